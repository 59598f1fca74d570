"""The commands of the command line: what each reads, runs and prints."""
