//! What swapping all day would do to an SSD.

use serde::Serialize;

use super::folder::Folder;

/// What a common consumer SSD of 1 TB is rated to have written to it, in 10^12 bytes.
const RATED_TBW: f64 = 600.;
const SECONDS_A_DAY: f64 = 86_400.;

/// Bytes written at full use of the tier: all that moves out comes back, so the disk writes for one
/// part of the time and reads for the other.
#[derive(Debug, Serialize)]
pub(super) struct Wear {
    pub(super) written_tb_per_day: f64,
    pub(super) written_tb_per_year: f64,
    /// The rating that the days below are for.
    pub(super) rated_tbw: f64,
    /// Days of full use until a drive with this rating has had it.
    pub(super) days_to_rating: f64,
}

impl Wear {
    pub(super) fn at(folder: &Folder) -> Self {
        Self::of(folder.write_gb_per_s, folder.read_gb_per_s)
    }

    fn of(write_gb_per_s: f64, read_gb_per_s: f64) -> Self {
        let gb_per_s = round_trip_gb_per_s(write_gb_per_s, read_gb_per_s);
        let written_tb_per_day = gb_per_s * SECONDS_A_DAY / 1e3;
        Self {
            written_tb_per_day,
            written_tb_per_year: written_tb_per_day * 365.,
            rated_tbw: RATED_TBW,
            days_to_rating: RATED_TBW / written_tb_per_day,
        }
    }
}

/// Bytes that go out and come back, in 10^9 a second, one way after the other.
pub(super) fn round_trip_gb_per_s(write: f64, read: f64) -> f64 {
    1. / (1. / write + 1. / read)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 GB/s out and 2 GB/s in are 1 GB/s of round trips: 86.4 TB a day.
    #[test]
    fn a_day_of_full_use() {
        let wear = Wear::of(2., 2.);
        assert!((wear.written_tb_per_day - 86.4).abs() < 1e-9);
        assert!((wear.written_tb_per_year - 31_536.).abs() < 1e-6);
        assert!((wear.days_to_rating - 600. / 86.4).abs() < 1e-9);
    }
}
