//! The target `policy` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ebbtide_fuzz::targets::policy(bytes));
