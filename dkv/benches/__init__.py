"""Measurements that the command line prints; each module returns plain lists of dictionaries."""
