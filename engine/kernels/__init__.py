"""Triton kernels and the host lists they read; knows no scheduler, model or request."""
