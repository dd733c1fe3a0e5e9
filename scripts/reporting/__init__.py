"""What `scripts/report.py` is made of: records and citations, tables, figures, the page."""
