//! Dates of requests and replies, in seconds since 1970, UTC.

const DAY_S: u64 = 86400;
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// The date of a request: `20130524T000000Z`. The first 8 bytes are the day.
pub fn stamp(wall_s: u64) -> String {
    let (year, month, day) = day_of(wall_s / DAY_S);
    let second = wall_s % DAY_S;
    let (h, m, s) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{day:02}T{h:02}{m:02}{s:02}Z")
}

/// The date of a reply: `Fri, 24 May 2013 00:00:00 GMT`. None = it is no date.
pub fn of_header(text: &str) -> Option<u64> {
    let rest = text.split_once(", ")?.1.strip_suffix(" GMT")?;
    let mut words = rest.split(' ');
    let day = number(words.next()?, 2)?;
    let name = words.next()?;
    let month = MONTHS.iter().position(|month| *month == name)? as u64 + 1;
    let year = number(words.next()?, 4)?;
    let mut clock = words.next()?.split(':');
    let mut part = |most: u64| number(clock.next()?, 2).filter(|&n| n <= most);
    // 60 is a leap second.
    let (h, m, s) = (part(23)?, part(59)?, part(60)?);
    if words.next().is_some() || clock.next().is_some() || year < 1970 || !(1..=31).contains(&day) {
        return None;
    }
    Some(days_to(year, month, day) * DAY_S + h * 3600 + m * 60 + s)
}

fn number(text: &str, digits: usize) -> Option<u64> {
    let is_number = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { text.parse().ok() } else { None }
}

/// Days from 1970 to a Gregorian date. Years begin in March, so that a leap day is the last day of
/// its year.
fn days_to(year: u64, month: u64, day: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + of_year - 719_468
}

/// The inverse: year, month and day.
fn day_of(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates_are_formatted_and_parsed() {
        assert_eq!(stamp(1_369_353_600), "20130524T000000Z");
        assert_eq!(stamp(0), "19700101T000000Z");
        assert_eq!(stamp(951_782_399), "20000228T235959Z");
        assert_eq!(stamp(951_782_400), "20000229T000000Z");
        assert_eq!(stamp(4_107_542_399), "21000228T235959Z");
        assert_eq!(stamp(4_107_542_400), "21000301T000000Z");
        assert_eq!(of_header("Fri, 24 May 2013 00:00:00 GMT"), Some(1_369_353_600));
        assert_eq!(of_header("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
    }

    #[test]
    fn date_conversions_are_inverse() {
        for day in 0..200_000 {
            let (year, month, of_month) = day_of(day);
            assert_eq!(days_to(year, month, of_month), day);
        }
    }

    #[test]
    fn invalid_dates_are_rejected() {
        for text in [
            "",
            "Fri, 24 May 2013 00:00:00",
            "24 May 2013 00:00:00 GMT",
            "Fri, 24 Mai 2013 00:00:00 GMT",
            "Fri, 24 May 1969 00:00:00 GMT",
            "Fri, 24 May 2013 24:00:00 GMT",
            "Fri, 24 May 2013 00:00 GMT",
            "Fri, +4 May 2013 00:00:00 GMT",
            "Fri, 00 May 2013 00:00:00 GMT",
            "Fri, 24 May 2013 00:00:00 00 GMT",
        ] {
            assert_eq!(of_header(text), None, "{text}");
        }
    }
}
