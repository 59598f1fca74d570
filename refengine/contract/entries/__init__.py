"""The entries, a module for each kind of kernel; importing one registers what it holds."""
