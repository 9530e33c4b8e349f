"""Streamlit pages and the figures they draw."""
