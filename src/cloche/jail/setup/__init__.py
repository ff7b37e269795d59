"""TODO jail/setup"""
