"""Report: tables, pictures and text, built from run folders alone."""
