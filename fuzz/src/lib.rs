//! Fuzzing of ebbtide's parsers: whatever the bytes, the answer is a value or an error, never a
//! panic, and memory stays in proportion to the input.
//!
//! Targets are plain functions of bytes. Two things run them: libFuzzer, for those who have
//! cargo-fuzz and a nightly toolchain (`fuzz_targets/`), and the binary `smoke`, which needs
//! neither and mutates the files of `corpus/` without looking at coverage.

pub mod corpus;
pub mod mutate;
pub mod random;
pub mod targets;
