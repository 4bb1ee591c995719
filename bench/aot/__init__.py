"""Every kernel compiled ahead of time, without a GPU, as its launcher would have it compiled.

    calls     the calls of the public ops whose launches are looked at, and what is expected of each kernel
    record    runs a call and notes its launches, specialised by Triton itself, in place of doing them
    build     compiles one of them and reads registers, spills, memory and instructions out of the result
    rules     what a kernel must not do
    targets   the GPUs

``bench/static.py`` is the command. Nothing here may run with TRITON_INTERPRET set: there is nothing to compile then.
"""
