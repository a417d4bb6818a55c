"""One model family a file; what they share is beside them. Families know no threads."""
