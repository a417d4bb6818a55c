"""What happens between submit and result: admission, preprocessing threads, replicas.

A job is queued (scheduler), prepared (preprocessing thread), ready (scheduler), run (replica), done.
The engine is given functions and never imports a family.
"""
