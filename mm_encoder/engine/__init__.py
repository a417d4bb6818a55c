"""What happens between submit and result; docs/architecture.md tells it as one story, with diagrams.

The engine is given functions and never imports a family.
"""
