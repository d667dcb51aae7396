"""Checkpoints at rest: what the tools do with them without a model, a mesh or a GPU.

    opened.py    ours or a release's folder behind one interface
    relay.py     cut a checkpoint along a target layout
    verify.py    hashes, completeness, finite values, names
    compare.py   two checkpoints, value by value
    resize.py    split or merge files of safetensors
"""
