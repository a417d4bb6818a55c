"""Model families, one per file, and the layers they share. Families know nothing of threads."""
