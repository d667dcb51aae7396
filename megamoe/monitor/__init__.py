"""What a person sees of a run. `Monitor` is loaded on first use: the config of this section must import in no time."""


def __getattr__(name: str):
    if name in ("Monitor", "FirstScreen"):
        from megamoe.monitor import monitor

        return getattr(monitor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
