"""Figures of the MindSpore front end."""
