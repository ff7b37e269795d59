"""TODO backends/containers/inside"""
