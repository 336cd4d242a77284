"""Bridges to other libraries. Each is imported by name and needs that library installed."""
