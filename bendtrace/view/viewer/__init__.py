"""A run as one HTML file to explore: no server, no network, no framework."""

from bendtrace.view.viewer.page import stepped_html, viewer_frame, viewer_html

__all__ = ["stepped_html", "viewer_frame", "viewer_html"]
