"""Draw the pages and figures of runs; report.py makes the page from report.html."""
