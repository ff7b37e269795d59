"""TODO skills"""
