"""The engine's own parts to look at: pictures, tables and excerpts for the documentation, traces and a debugger of kernels."""
