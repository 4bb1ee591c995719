"""Triton kernels, the twins of `dspark_fast.reference`: the same file and function names, the same signatures.

Installed as `dspark_fast.kernels`, never as a top-level package. A file here imports torch, triton and its neighbours
only, the neighbours by relative import.
"""
