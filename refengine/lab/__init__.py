"""Pictures, tables and excerpts of the engine's own parts, for the documentation: made by the code that they show."""
