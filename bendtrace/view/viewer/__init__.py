"""A run as one HTML file that can be walked through: no server, no network, no framework."""

from bendtrace.view.viewer.page import viewer_frame, viewer_html

__all__ = ["viewer_frame", "viewer_html"]
