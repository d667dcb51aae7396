"""Released (Hugging Face) checkpoints: their tensor names, their files, and the way to our format and back.

    names.py     the one table: logical name <-> released name, with shape, dtype and form
    config.py    config.json <-> ModelConfig
    files.py     folders of safetensors: headers first, then byte ranges; writing in streams
    experts.py   MXFP4 experts: decode, and encode only what changed
    check.py     headers against the table
    importing.py, exporting.py   both ways, in several processes
"""
