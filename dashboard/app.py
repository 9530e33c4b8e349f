"""The dashboard's entry point for Streamlit; `inferloop dashboard` starts it."""

from __future__ import annotations

import streamlit as st

from dashboard import labelling, latency

st.set_page_config(page_title="inferloop", page_icon=":material/all_inclusive:", layout="wide")
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
