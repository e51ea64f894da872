#!/usr/bin/env bash
PYTHONDONTWRITEBYTECODE=1 exec python3 deploy/bazel/check_ptxas_test.py
