"""Why a request was slow: a chain of SQL pieces, the macro made of them, the report for people."""
