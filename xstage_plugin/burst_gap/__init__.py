"""The Burst–Gap model of a platform: what it is, how it is measured, fitted, read and written."""
