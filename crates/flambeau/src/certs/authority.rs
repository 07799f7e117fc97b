//! The certificates of an authority and of those that it signs.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{ALL_VERIFICATION_ALGS, EndEntityCert, KeyUsage, anchor_from_trusted_cert};

/// The number of days for which the authority is valid. The certificates that it signs are renewed more often.
const AUTHORITY_DAYS: u16 = 3650;

/// An authority that can sign.
pub(super) type Authority = Issuer<'static, KeyPair>;

/// Makes a new authority. Returns its certificate and its key.
pub(super) fn new_authority() -> Result<(String, String), rcgen::Error> {
    let mut params = valid_for(AUTHORITY_DAYS);
    params
        .distinguished_name
        .push(DnType::CommonName, "Flambeau's private authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

/// Makes a certificate for a name. Returns it and its key.
pub(super) fn signed(
    authority: &Authority,
    name: &str,
    days: u16,
) -> Result<(String, String), rcgen::Error> {
    let mut params = valid_for(days);
    params.subject_alt_names = CertificateParams::new([name.to_owned()])?.subject_alt_names;
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate()?;
    Ok((
        params.signed_by(&key, authority)?.pem(),
        key.serialize_pem(),
    ))
}

fn valid_for(days: u16) -> CertificateParams {
    let mut params = CertificateParams::default();
    let now = time::OffsetDateTime::now_utc();
    // The clocks of machines differ.
    params.not_before = now - time::Duration::hours(1);
    params.not_after = now + time::Duration::days(days.into());
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
}

/// Returns whether an authority has signed a certificate.
pub(super) fn has_signed(authority: &str, certificate: &str) -> bool {
    let [authority, certificate] =
        [authority, certificate].map(|pem| CertificateDer::from_pem_slice(pem.as_bytes()));
    let (Ok(authority), Ok(certificate)) = (authority, certificate) else {
        return false;
    };
    let anchor = anchor_from_trusted_cert(&authority);
    let (Ok(anchor), Ok(certificate)) = (anchor, EndEntityCert::try_from(&certificate)) else {
        return false;
    };
    let (anchors, usage) = ([anchor], KeyUsage::client_auth());
    let (algorithms, now) = (ALL_VERIFICATION_ALGS, UnixTime::now());
    let verified = certificate.verify_for_usage(algorithms, &anchors, &[], now, usage, None, None);
    verified.is_ok()
}
