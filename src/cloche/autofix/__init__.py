"""TODO autofix"""
