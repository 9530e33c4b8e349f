"""What the mirror is made of: sampling, redaction, truncation, files.

It starts in `capture.mirror`.
"""
