"""What is in a folder of ours, and whether its files are as they were written; nothing is changed."""
