"""TODO blocking"""
