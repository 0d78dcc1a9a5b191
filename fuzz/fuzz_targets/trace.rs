//! The target `trace` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ebbtide_fuzz::targets::trace(bytes));
