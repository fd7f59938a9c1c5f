export default function Incident() { return <h1>Incident</h1> }
