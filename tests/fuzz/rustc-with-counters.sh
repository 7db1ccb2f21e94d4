#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `cargo xtask fuzz --smoke`: compiles the workspace's
# crates with a counter on every edge. Build scripts run on the host and have
# nothing that would define the counters' functions.
case " $* " in
  *" --crate-name build_script_"*) exec "$@" ;;
esac
exec "$@" -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=3 \
  -C llvm-args=-sanitizer-coverage-inline-8bit-counters
