//! Small changes to an input.

use std::ops::Range;

use crate::random::Random;

/// Longest input that is made.
const LONGEST: usize = 64 << 10;
/// Most changes to one input.
const CHANGES: usize = 6;

/// Bytes at the edges of what parsers expect, as text and as little-endian words.
const EDGES: [&[u8]; 22] = [
    b"0",
    b"-1",
    b"1e308",
    b"255",
    b"4294967296",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"340282366920938463463374607431768211456",
    b"99999999999999999999999999999999999999999999",
    b"0.0000000000000000000000000000000000000001",
    b"null",
    b"[]",
    b"{",
    b"\"",
    b"\\",
    b"\0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\0\0\0\0\0\0\0\x80",
    "\u{ffff}\u{e9}".as_bytes(),
    b":,-. \t\n",
];

/// One of `seeds`, changed once to a few times.
///
/// # Panics
/// There is no seed.
pub fn mutant(seeds: &[Vec<u8>], framed: bool, random: &mut Random) -> Vec<u8> {
    let seed = random.pick(seeds);
    let mut bytes = seed.clone();
    // Most of a file of tensors are numbers that nobody parses: half of the changes are to the rest.
    let head = if framed { seed.len() - data_length(seed) } else { seed.len() };
    for _ in 0..=random.below(CHANGES) {
        let place = if random.below(2) == 0 { head } else { bytes.len() };
        change(&mut bytes, place, seeds, random);
        bytes.truncate(LONGEST);
    }
    if framed && random.below(4) > 0 {
        frame(&mut bytes, data_length(seed));
    }
    bytes
}

/// Changes the first `place` bytes in one way.
fn change(bytes: &mut Vec<u8>, place: usize, seeds: &[Vec<u8>], random: &mut Random) {
    let place = place.min(bytes.len());
    let at = random.below(place + 1);
    match random.below(9) {
        0 => flip(bytes, at, random),
        1 => set(bytes, at, random),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(span(at, bytes.len(), random))),
        4 => {
            let copy = bytes[span(at, bytes.len(), random)].to_vec();
            let to = random.below(place + 1);
            bytes.splice(to..to, copy);
        }
        5 => {
            let other = random.pick(seeds);
            let from = random.below(other.len() + 1);
            let part = other[span(from, other.len(), random)].to_vec();
            bytes.splice(at..at, part);
        }
        6 => drop(bytes.splice(at..at, random.pick(&EDGES).iter().copied())),
        7 => {
            let end = span(at, bytes.len(), random);
            drop(bytes.splice(end, random.pick(&EDGES).iter().copied()));
        }
        _ => number(bytes, at, place, random),
    }
}

fn flip(bytes: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn set(bytes: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = bytes.get_mut(at) {
        *byte = random.word().to_le_bytes()[0];
    }
}

/// A few bytes from `at` on, now and then many.
fn span(at: usize, end: usize, random: &mut Random) -> Range<usize> {
    let most = if random.below(8) == 0 { end } else { 8 };
    at..(at + random.below(most + 1)).min(end)
}

/// Puts an edge, or a neighbour, in place of the next number that is written in digits.
fn number(bytes: &mut Vec<u8>, at: usize, end: usize, random: &mut Random) {
    let digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = bytes[at..end].iter().position(digit).map(|start| start + at) else {
        return;
    };
    let length = bytes[start..].iter().take_while(|byte| digit(byte)).count();
    let text = String::from_utf8_lossy(&bytes[start..start + length]);
    let old = text.parse::<u64>().unwrap_or(0);
    let new = match random.below(4) {
        0 => old.wrapping_add(1).to_string().into_bytes(),
        1 => old.wrapping_sub(1).to_string().into_bytes(),
        2 => (1u64 << random.below(64)).to_string().into_bytes(),
        _ => random.pick(&EDGES[..11]).to_vec(),
    };
    bytes.splice(start..start + length, new);
}

/// Bytes after the header of a safetensors file; 0 for what is none.
fn data_length(file: &[u8]) -> usize {
    let header = file.first_chunk().map(|length| u64::from_le_bytes(*length));
    let header = header.and_then(|length| usize::try_from(length).ok());
    header.and_then(|length| file.len().checked_sub(length.checked_add(8)?)).unwrap_or(0)
}

/// Makes the length at the start that of a header before `data` bytes.
fn frame(bytes: &mut [u8], data: usize) {
    let header = bytes.len().saturating_sub(8).saturating_sub(data) as u64;
    if let Some(length) = bytes.first_chunk_mut() {
        *length = header.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_can_be_repeated_alone_and_runs_differ() {
        let seeds = [b"0-7:swap,8-10:recompute".to_vec(), b"keep".to_vec()];
        let of = |index| mutant(&seeds, false, &mut Random::of(5, index));
        let all: Vec<_> = (0..2000).map(of).collect();
        assert_eq!(of(1234), all[1234]);
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert!(distinct.len() > 1500, "{}", distinct.len());
    }

    #[test]
    fn framed_inputs_mostly_keep_a_length_that_is_right() {
        let mut seed = 2u64.to_le_bytes().to_vec();
        seed.extend(b"{}12345678");
        assert_eq!(data_length(&seed), 8);
        let seeds = [seed];
        let right = |index: &u64| {
            let bytes = mutant(&seeds, true, &mut Random::of(1, *index));
            data_length(&bytes) == 8
        };
        assert!((0..1000).filter(right).count() > 500);
    }
}
