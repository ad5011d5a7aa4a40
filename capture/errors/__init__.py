"""The user's code: imported and called, with errors in one line that name its file and line.

`user_code` imports and calls it and finds the lines to blame; `capture_errors` are about models
that cannot be captured. Begin with `user_code`.
"""
