"""What happens between submit and result; docs/architecture.md tells it as one story, with diagrams.

The engine is given a pipeline and never imports a family.
"""
