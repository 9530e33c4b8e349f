"""Runs recorded traffic through two builds over HTTP and computes what changed."""
