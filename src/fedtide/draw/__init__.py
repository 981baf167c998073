"""Pictures, tables and pages made of numbers; nothing here knows a run."""
