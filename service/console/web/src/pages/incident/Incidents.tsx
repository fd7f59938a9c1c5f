export default function Incidents() { return <h1>Incidents</h1> }
