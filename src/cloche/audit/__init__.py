"""TODO audit"""
