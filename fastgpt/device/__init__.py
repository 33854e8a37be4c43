"""Devices: which one to use, its precision, speed and memory."""
