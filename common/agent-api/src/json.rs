//! Serialisers for field types without a serde implementation.

use protobuf::{Enum, EnumOrUnknown, MessageField};
use serde::{Serialize, Serializer};

/// Serialises an enum as its number, known or not.
pub(crate) fn number<E: Enum, S: Serializer>(field: &EnumOrUnknown<E>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_i32(field.value())
}

/// Serialises a message, or null if it is not set.
pub(crate) fn message<M: Serialize, S: Serializer>(field: &MessageField<M>, serializer: S) -> Result<S::Ok, S::Error> {
    field.as_ref().serialize(serializer)
}
