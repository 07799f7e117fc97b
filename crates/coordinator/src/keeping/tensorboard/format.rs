//! The format of TensorBoard's event files: TFRecords with checksums, each of which holds a protobuf `Event`. The
//! messages have only the fields that are written here, with the field numbers of TensorFlow's `event.proto` and
//! `summary.proto`.

/// The content of the first record, by which readers recognise the format.
const FILE_VERSION: &str = "brain.Event:2";

/// `SessionLog.SessionStatus.START`: readers drop the events that they have read of this step and of later ones.
const START: i32 = 1;

/// A record of an event file.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(super) summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub(super) session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<Value>,
}

/// A named value: either `simple_value` or `histo` is set.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "5")]
    pub(super) histo: Option<HistogramProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HistogramProto {
    #[prost(double, tag = "1")]
    pub(super) min: f64,
    #[prost(double, tag = "2")]
    pub(super) max: f64,
    #[prost(double, tag = "3")]
    pub(super) num: f64,
    #[prost(double, tag = "4")]
    pub(super) sum: f64,
    #[prost(double, tag = "5")]
    pub(super) sum_squares: f64,
    /// The upper ends of the buckets.
    #[prost(double, repeated, tag = "6")]
    pub(super) bucket_limit: Vec<f64>,
    /// The number of values in each bucket.
    #[prost(double, repeated, tag = "7")]
    pub(super) bucket: Vec<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

impl Event {
    /// Returns the first record of a file.
    pub(super) fn version(wall_time: f64) -> Self {
        Self {
            wall_time,
            file_version: Some(FILE_VERSION.to_owned()),
            ..Self::default()
        }
    }

    /// Returns the record after which readers drop `step` and later steps, because training went back to `step`.
    pub(super) fn went_back(wall_time: f64, step: u64) -> Self {
        Self {
            wall_time,
            step: step.try_into().unwrap_or(i64::MAX),
            session_log: Some(SessionLog { status: START }),
            ..Self::default()
        }
    }

    /// Returns a record of values.
    pub(super) fn of_values(wall_time: f64, step: u64, value: Vec<Value>) -> Self {
        Self {
            wall_time,
            step: step.try_into().unwrap_or(i64::MAX),
            summary: Some(Summary { value }),
            ..Self::default()
        }
    }

    /// Encodes the event as a TFRecord: length, checksum of the length, content, checksum of the content.
    pub(super) fn to_record(&self) -> Vec<u8> {
        let content = prost::Message::encode_to_vec(self);
        let length = (content.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(content.len() + 16);
        record.extend(length);
        record.extend(masked(crc32c::crc32c(&length)).to_le_bytes());
        record.extend(&content);
        record.extend(masked(crc32c::crc32c(&content)).to_le_bytes());
        record
    }
}

impl Value {
    pub(super) fn scalar(tag: &str, value: f64) -> Self {
        Self {
            tag: tag.to_owned(),
            simple_value: Some(value as f32),
            histo: None,
        }
    }

    pub(super) fn histogram(tag: String, histogram: HistogramProto) -> Self {
        Self {
            tag,
            simple_value: None,
            histo: Some(histogram),
        }
    }
}

/// Masks a CRC as TFRecords do: rotates it and adds a constant. Otherwise, a CRC over content that includes CRCs would
/// be weak.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_byte_for_byte_that_of_tensorflow() {
        // From a file that TensorFlow's writer has begun, with the time 1.5.
        let content = b"\x09\x00\x00\x00\x00\x00\x00\xf8\x3f\x1a\x0dbrain.Event:2";
        let record = Event::version(1.5).to_record();
        assert_eq!(record.len(), 8 + 4 + content.len() + 4);
        assert_eq!(&record[..8], [24, 0, 0, 0, 0, 0, 0, 0]);
        // Each of TensorBoard's files begins with a record of this length.
        assert_eq!(&record[8..12], [0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(&record[12..36], content);
    }

    #[test]
    fn the_checksum_is_masked_crc32c() {
        // RFC 3720 has the checksum of 32 zeros.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked(0), 0xa282_ead8);
        assert_eq!(masked(0x0000_8000), 0xa282_ead9);
    }
}
