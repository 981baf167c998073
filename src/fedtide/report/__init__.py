"""The report: tables, pictures and words, from run folders alone."""
