"""The dashboard's entry point for Streamlit; `inferloop dashboard` starts it."""

from __future__ import annotations

import streamlit as st

from dashboard import labelling, latency

# Drawn here because Streamlit would fetch a named icon from the internet.
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">
<path d="M32 10 a22 22 0 1 1 -18 9" fill="none" stroke="#5B2A86" stroke-width="10"
 stroke-linecap="round"/><circle cx="32" cy="32" r="6" fill="#E4572E"/></svg>"""
STYLE = """<style>
.stMainBlockContainer { padding-top: 3rem; padding-bottom: 2rem; }
h1 { padding-top: 0; }
</style>"""

st.set_page_config(page_title="inferloop", page_icon=ICON, layout="wide")
st.html(STYLE)
st.navigation(
    [
        st.Page(
            latency.page,
            title="Latency heat map",
            icon=":material/blur_on:",
            url_path="latency",
            default=True,
        ),
        st.Page(
            labelling.page, title="Judge what changed", icon=":material/balance:", url_path="judge"
        ),
    ]
).run()
