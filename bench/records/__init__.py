"""The shape of every file in a run folder, and nothing else.

Rows and documents are plain dataclasses. Whoever writes or reads a run file
does it through this package, so that the columns exist in one place.
"""
