// Templates: what `templates.py` shows, with the packages for Node.
import assert from 'node:assert/strict'
import { writeFileSync } from 'node:fs'

export const programs = []
