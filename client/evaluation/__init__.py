"""Fidelity and speed, measured on a real model through the real sidecar."""
